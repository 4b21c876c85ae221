"""The engines that a replica can run."""
