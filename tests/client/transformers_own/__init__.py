"""The model tests that transformers ships in its source distribution, run with remote experts."""
