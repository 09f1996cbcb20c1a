-- Changing a limit.
--
-- ARGV  5 q for a queue's or n for one by name, 6 its name, 7 terms, or '' for those declared, 8 '1' when code declares them
-- Returns 1, 2 when ticks are to carry the change to more keys, or {'moved', where}.

local again = said_before() or departure()
if again then return again end

come_due()
if ARGV[5] == 'q' then
  Gates.set(ARGV[6], ARGV[7], ARGV[8] == '1')
else
  Lanes.set(ARGV[6], ARGV[7], ARGV[8] == '1')
end
finish_step()
return say(limits.walking and 2 or 1)
