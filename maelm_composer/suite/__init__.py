"""From nothing to the tables and figures of one scale: what it needs, what is missing, what it costs; and making it."""
