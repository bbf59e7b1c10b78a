"""transformers' `ModelTesterMixin` for four families. test_transformers_own.py unpacks the package `transformers_tests`."""

import unittest

import torch
import transformers
from transformers_tests.test_modeling_common import ModelTesterMixin, ids_tensor

from tests.models.coverage_families import tiny_config


class Inputs:
    """What the mixin asks of a model's tester."""

    batch_size, seq_length, is_training, vocab_size = 2, 7, True, 90

    def __init__(self, family, parent):
        self.family, self.parent = family, parent
        config = self.get_config()
        self.hidden_size, self.num_hidden_layers = config.hidden_size, config.num_hidden_layers
        self.num_attention_heads = config.num_attention_heads
        self.key_length = self.encoder_seq_length = self.seq_length

    def get_config(self):
        config = tiny_config(self.family)
        config.pad_token_id = config.vocab_size - 1
        if getattr(config, "head_dim", 0) is None:  # tests of rotary embeddings ask for it
            config.head_dim = config.hidden_size // config.num_attention_heads
        return config

    def prepare_config_and_inputs_for_common(self):
        ids = ids_tensor([self.batch_size, self.seq_length], self.vocab_size)
        return self.get_config(), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    prepare_config_and_inputs = prepare_config_and_inputs_for_common


class Family(ModelTesterMixin):
    family, prefix = "", ""

    @property
    def all_model_classes(self):
        return tuple(getattr(transformers, self.prefix + head) for head in ("Model", "ForCausalLM"))

    def setUp(self):
        self.model_tester = Inputs(self.family, self)


class MixtralTest(Family, unittest.TestCase):
    family, prefix = "mixtral", "Mixtral"


class Qwen3MoeTest(Family, unittest.TestCase):
    family, prefix = "qwen3_moe", "Qwen3Moe"


class DeepseekV3Test(Family, unittest.TestCase):
    family, prefix = "deepseek_v3", "DeepseekV3"


class GptOssTest(Family, unittest.TestCase):
    family, prefix = "gpt_oss", "GptOss"
