"""Drivers and named fakes for the tests, importable as ``support`` also in spawned processes."""
