"""For every test: properties have no deadline. How long an example takes says something about the machine alone."""

from hypothesis import settings

settings.register_profile("untimed", parent=settings(), deadline=None)
settings.load_profile("untimed")
