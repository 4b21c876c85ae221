"""The fake torch-xla: importing it fixes which variables count."""

import os

import fake_nxdi

__version__ = "2.9.0"
fake_nxdi.AT_IMPORT = dict(os.environ)
