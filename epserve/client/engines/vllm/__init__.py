"""vLLM keeps attention, embeddings, gates and shared experts. The routed experts run in a service.

`plugin` notices that a configuration asks for it, `settings` reads what it asks, `contracts` says which vLLM fits, `loader`
leaves out the experts' tensors, and `experts` and `operators` stand in the place of vLLM's experts. Only `contracts`,
`loader`, `experts` and `operators` import vLLM, and only in processes whose configuration asks.
"""
