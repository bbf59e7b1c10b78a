"""SGLang keeps attention, embeddings, gates and shared experts. The routed experts run in a service.

`plugin` registers the hooks, and `experts` has what they put into the place of SGLang's experts. Both are written against
SGLang 0.5.23 and tested against a stand-in of its contracts: SGLang has no wheel for CPUs.
"""
