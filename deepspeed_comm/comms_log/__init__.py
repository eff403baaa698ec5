"""The communication log: its records, tables, files, traces and figures.

deepspeed_comm.configure(), log_summary(), save_log() and save_trace() are its interface.
"""
