"""What everything stands on: trees, buckets, scalars, numbers, random draws, formatting."""
