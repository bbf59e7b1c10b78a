"""Device code of the all-to-all backends. Launchers and checks live one level up."""
