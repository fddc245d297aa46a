"""Conventions of other libraries, to check that results stay the same after a migration. Never a default."""
