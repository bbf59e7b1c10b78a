"""Hugging Face models whose experts run in the service: attention here, experts there.

import epserve.transformers
from transformers import AutoModelForCausalLM

with epserve.transformers.connect("10.0.0.10:50051"):
    model = AutoModelForCausalLM.from_pretrained(path, experts_implementation="epserve")
"""

from epserve.client.engines.transformers import *  # noqa: F403
from epserve.client.engines.transformers import __all__ as __all__
