"""Observations to findings: why a Job has not answered (`jobs`), why replicas do not (`replicas`). Called by `decide`
and `steps`; `pods` has what both share.

Messages carry numbers and names and no running clocks, so that a state that does not change is not written again.
"""
