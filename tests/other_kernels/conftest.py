"""Without Triton nothing is collected here; the header of pytest's report says so (tests/conftest.py)."""

from needs_triton import reason_to_leave_out

collect_ignore_glob = ["test_*.py"] if reason_to_leave_out() else []
