"""Which files of this folder need a library that is not installed; the report of pytest names the library."""

import array_libraries

collect_ignore = ["test_diffusers.py"] if "diffusers" in array_libraries.MISSING else []
