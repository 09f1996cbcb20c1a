-- Housekeeping. ARGV  5 number of jobs to prune at most, 0 to move only due jobs. Returns 1 when there is more to do.

function Verbs.housekeeping()
  local most, more = tonumber(ARGV[5]), come_due()
  if most > 0 and not more then
    flow()
    flush()
    more = prune(most, most, math.ceil(most / 5))
    more = Unique.sweep(most) >= most or more
    more = prune_history(most) >= most or more
  end
  finish_step()
  return (more or most > 0 and (flows_on() or limits.walking)) and 1 or 0
end
