"""Tests of transformers that are not run with remote experts, each with its reason."""

SAVES = "saves a model whose experts are remote, which is refused"
WEIGHTS = "looks at the weights of experts, which are not in this process"
DISTRIBUTION = "about a module of transformers' tests that its source distribution lacks"

PROCESS = "sets torch's default dtype for the whole process, in which the rank of these tests runs too"

EXCLUDED = {
    "test_can_load_from_already_mapped_keys": WEIGHTS,
    "test_can_use_safetensors": WEIGHTS,
    "test_can_init_all_missing_weights": WEIGHTS,
    "test_eager_matches_batched_and_grouped_inference_0_fp16": SAVES,
    "test_eager_matches_batched_and_grouped_inference_1_fp32": SAVES,
    "test_eager_matches_batched_and_grouped_inference_2_bf16": SAVES,
    "test_from_pretrained_no_checkpoint": WEIGHTS,
    "test_generation_tester_mixin_inheritance": DISTRIBUTION,
    "test_keep_in_fp32_modules_strict_also_hardcode_fp32": PROCESS,
    "test_load_save_without_tied_weights": WEIGHTS,
    "test_reverse_loading_mapping": WEIGHTS,
    "test_model_weights_reload_no_missing_tied_weights": WEIGHTS,
    "test_save_load": SAVES,
}
