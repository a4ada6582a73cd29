"""Programs for TPUs compiled and costed where there is no TPU; needs the extra `aot` (libtpu)."""
