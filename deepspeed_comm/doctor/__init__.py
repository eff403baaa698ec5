"""The doctor: looks at one host and says what would keep dscomm from working there.

    dscomm doctor [--json] [--hosts] [--limit SECONDS]

Run it on each host, in the environment, container and job in which the ranks run: under a launcher
it also looks at what that has set. Nothing is changed, and nothing is left behind. What might crash
or hang happens in processes of its own, which are ended at the limit.

The exit status is 0 without a problem, 1 with one, 2 for a wrong option. Warnings are no problems.
"""
