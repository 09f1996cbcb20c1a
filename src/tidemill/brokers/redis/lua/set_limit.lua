-- Change a limit.
--
-- ARGV  5 q for a queue's limit, n for a limit by name, 6 name, 7 settings, or '' for the declared settings, 8 '1' when
--       code declares them
-- Returns 1, or 2 when `housekeeping` must carry the change to more partitions, or {'moved', where}.

function Verbs.set_limit()
  local again = cached_reply() or departure()
  if again then return again end

  come_due()
  if ARGV[5] == 'q' then
    QueueLimits.set(ARGV[6], ARGV[7], ARGV[8] == '1')
  else
    Partitions.set(ARGV[6], ARGV[7], ARGV[8] == '1')
  end
  finish_step()
  return cache_reply(limits.walking and 2 or 1)
end
