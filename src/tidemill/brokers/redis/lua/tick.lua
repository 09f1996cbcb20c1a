-- Housekeeping. ARGV  5 how many to prune at most. Returns 1 when there is more to do.

local more = come_due()
flow()
flush()
more = prune(tonumber(ARGV[5]), true, true) >= tonumber(ARGV[5]) or more
more = Keys.sweep(tonumber(ARGV[5])) >= tonumber(ARGV[5]) or more
finish_step()
return (more or flows_on()) and 1 or 0
