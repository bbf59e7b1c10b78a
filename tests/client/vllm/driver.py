"""Runs in the environment of vLLM: `python driver.py JOBS.json RESULTS.json`.

A job is {"path": checkpoint, "epserve": settings or null, "new_tokens": int, ...further arguments of LLM}. All run in one
process.
"""

import json
import sys
from pathlib import Path

PROMPTS = [[5 + (7 * number + 11 * place) % 500 for place in range(9 + number)] for number in range(4)]


def run(job):
    from vllm import LLM, SamplingParams

    new_tokens, wanted = job.pop("new_tokens"), job.pop("epserve")
    settings = {"dtype": "float32", "enforce_eager": True, "max_model_len": 256, "max_num_seqs": 4, "seed": 0, "max_logprobs": 5,
                "enable_prefix_caching": False, "disable_log_stats": True}  # fmt: skip
    read = read_bytes()
    llm = LLM(job.pop("path"), additional_config={"epserve": wanted} if wanted else {}, **settings | job)
    facts = {"read": sum(read), "expert_parameters": llm.collective_rpc(expert_parameters)[0]}
    greedy = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, logprobs=5, detokenize=False)
    made = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], greedy, use_tqdm=False)
    outputs = [each.outputs[0] for each in made]
    llm.llm_engine.engine_core.shutdown()
    return facts | {
        "tokens": [list(each.token_ids) for each in outputs],
        "logprobs": [
            [{int(token): found.logprob for token, found in step.items()} for step in each.logprobs] for each in outputs
        ],
    }


def expert_parameters(worker):
    return [name for name, _ in worker.model_runner.get_model().named_parameters() if ".experts." in name]


def read_bytes():
    """A list that grows by the bytes of each tensor that vLLM reads from here on."""
    from vllm.model_executor.model_loader import weight_utils

    read, original = [], getattr(weight_utils.safe_open, "original", weight_utils.safe_open)

    class Counting:
        def __init__(self, *args, **kwargs):
            self.file = original(*args, **kwargs)

        def __enter__(self):
            self.opened = self.file.__enter__()
            return self

        def __exit__(self, *args):
            return self.file.__exit__(*args)

        def get_tensor(self, name):
            tensor = self.opened.get_tensor(name)
            read.append(tensor.nbytes)
            return tensor

        def __getattr__(self, name):
            return getattr(self.opened, name)

    Counting.original = original
    weight_utils.safe_open = Counting
    return read


def know_models():
    """vLLM looks at each class of models in a new process, which takes longer than all else here."""
    from vllm import ModelRegistry
    from vllm.model_executor.models import gpt_oss, mixtral, qwen2_moe, qwen3_moe

    for module, name in (
        (gpt_oss, "GptOssForCausalLM"),
        (mixtral, "MixtralForCausalLM"),
        (qwen2_moe, "Qwen2MoeForCausalLM"),
        (qwen3_moe, "Qwen3MoeForCausalLM"),
    ):
        ModelRegistry.register_model(name, getattr(module, name))


def main():
    jobs, results = sys.argv[1:3]
    know_models()
    found = []
    for job in json.loads(Path(jobs).read_text()):
        try:
            found.append(run(job))
        except Exception as error:
            causes = [error]
            while causes[-1].__cause__ or causes[-1].__context__:
                causes.append(causes[-1].__cause__ or causes[-1].__context__)
            found.append({"error": "\n".join(f"{type(each).__name__}: {each}" for each in causes)})
        Path(results).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
