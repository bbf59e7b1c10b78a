"""Device code of the all-to-all backends; launchers and checks live one level up."""
