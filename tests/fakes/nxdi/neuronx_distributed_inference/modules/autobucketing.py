from fake_nxdi.buckets import doubling as generate_buckets

__all__ = ["generate_buckets"]
