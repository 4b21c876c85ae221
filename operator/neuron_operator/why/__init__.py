"""Why a Job has left no record (`jobs`, for `steps`), and why replicas do not answer (`replicas`, for `decide`).

Messages contain no elapsed times, so that the status of an unchanged model is not rewritten.
"""
