-- Housekeeping. ARGV  5 how many to prune at most; 0: only what came due is moved. Returns 1 when there is more to do.

local most, more = tonumber(ARGV[5]), come_due('few')
if most > 0 then
  flow()
  flush()
  more = prune(most, true, true) >= most or more
  more = Keys.sweep(most) >= most or more
end
finish_step()
return (more or most > 0 and flows_on()) and 1 or 0
