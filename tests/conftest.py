"""Settings of all tests. `pytest --hypothesis-profile=long` tries 10,000 inputs for each property."""

from hypothesis import settings

settings.register_profile("short", max_examples=300)
settings.register_profile("long", max_examples=10_000)
settings.load_profile("short")
