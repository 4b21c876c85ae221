"""The fake NxD: only its version is looked at."""

import fake_nxdi

__version__ = {"0.7": "0.16.0", "0.8": "0.17.0", "0.9": "0.18.0", "0.10": "0.19.0"}[fake_nxdi.SETTINGS.version]
