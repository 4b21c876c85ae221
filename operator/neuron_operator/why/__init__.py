"""Why a Job has left no record (`jobs`, for `steps`), why replicas do not answer (`replicas`, for `decide`), and why
the API server refuses objects (`refusals`).

Messages contain no elapsed times, so that the status of an unchanged model is not rewritten.
"""
