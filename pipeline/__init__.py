"""Shared by the workers: configuration, schedule rules, plans, losses, and the command line. Imports infra and topics, never workers."""
