"""Hostile input for everything that reads what another process or a person wrote."""
