"""What the audit keeps of each record: packed numbers, and hashes of what is compared."""
