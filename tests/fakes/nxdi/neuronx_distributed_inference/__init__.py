"""The fake NxD Inference under the real one's name; what it does is in `fake_nxdi`."""

import fake_nxdi

__version__ = fake_nxdi.LIBRARY_VERSIONS[fake_nxdi.SETTINGS.version]
