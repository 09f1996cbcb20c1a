"""How jobs are leased: the step of an owner, the choice of jobs, limits, and due times."""
