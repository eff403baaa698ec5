"""The doctor: checks one host for faults that keep dscomm from working.

    dscomm doctor [--json] [--hosts] [--limit SECONDS]

Run it on each host, in the environment, container and job of the ranks; under a launcher it also
checks the launcher's variables. It changes nothing and leaves no files. Checks that may crash or
hang run in child processes, which are killed at the limit.

The exit status is 0 without a problem, 1 with one, 2 for a wrong option. Warnings are not problems.
"""
