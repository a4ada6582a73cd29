"""The main module of every py_test: runs pytest on the files it is given."""

import sys

import pytest

sys.exit(pytest.main(sys.argv[1:]))
