"""Runs Hugging Face models with their experts in the service: attention here, experts there.

    import epserve.transformers

    with epserve.transformers.connect("10.0.0.5:50051"):
        model = AutoModelForCausalLM.from_pretrained(path, experts_implementation="epserve")
        model.generate(**inputs)

Importing this package registers the experts implementation "epserve" with transformers. A model that is loaded with it has
experts modules without weights: those are neither allocated nor read. Requests that may succeed later (the service
restarts, its queue is full) are sent again until `retry_for_s` has passed, and generation goes on where it was.
"""

from .comparison import BLOCK_FAMILIES, differences
from .loading import attach, from_pretrained, register
from .remote_modules import BINDING, NAME, Binding
from .service import RETRY_FOR_S, Service, connect

__all__ = [
    "BINDING",
    "BLOCK_FAMILIES",
    "NAME",
    "RETRY_FOR_S",
    "Binding",
    "Service",
    "attach",
    "connect",
    "differences",
    "from_pretrained",
]

register()
