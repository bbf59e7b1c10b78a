"""What every rank will run and hold, decided before any weight is read. Pure functions."""
