"""How a record becomes bytes and back: columns, headers, and what is refused."""
