"""A campaign of faults: jobs that are killed, starved and lied to, and must end as if nothing had happened."""
