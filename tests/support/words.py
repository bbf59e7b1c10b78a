"""A tokenizer for tiny checkpoints: words `w4`, `w5`, ... that are the token ids 4, 5, ..."""

from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHAT = (
    "{% for message in messages %}w7 {{ message['content'] }} {% endfor %}{% if add_generation_prompt %}w8{% endif %}"
)


def write_tokenizer(folder: Path, vocab_size: int, *, chat: bool = False) -> PreTrainedTokenizerFast:
    """Ids 0 to 3 are padding, begin, end and unknown. chat: with a template, a question between `w7` and `w8`."""
    words = {f"<{number}>" if number < 4 else f"w{number}": number for number in range(vocab_size)}
    model = Tokenizer(models.WordLevel(words, unk_token="<3>"))
    model.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"pad_token": "<0>", "bos_token": "<1>", "eos_token": "<2>", "unk_token": "<3>"}
    made = PreTrainedTokenizerFast(tokenizer_object=model, **names)
    if chat:
        made.chat_template = CHAT
    made.save_pretrained(folder)
    return made
