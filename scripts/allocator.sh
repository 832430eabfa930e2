# To be sourced, before Python starts: glibc reads its tunables once. XLA's CPU client gets temporaries of a few to a few
# hundred MiB anew in every step; by default malloc maps them fresh and hands them back, and each step pays the page
# faults again. Large thresholds keep them in the heap, huge pages (hugetlb=1: madvise) make the first touch cheaper.
# No environment variable of XLA's does this. Without glibc (macOS, musl) the variable is read by nobody.
export GLIBC_TUNABLES=${GLIBC_TUNABLES:-glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=4294967296:glibc.malloc.trim_threshold=4294967296}
