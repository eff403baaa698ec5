"""Cases that tests of several folders share, the processes that run them, and expected results.

Cases import no tests. Tests, their programs and benchmarks import them as tests.cases, with the
root of the repository on the path.
"""
