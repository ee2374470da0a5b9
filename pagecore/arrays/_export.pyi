# Nothing for Python: other extensions cimport it.
