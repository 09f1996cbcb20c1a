-- Schedules: records under their names, and the order in which they are to be handed out. What is handed
-- out moves, from B:firing to B:claimed, to when it would be handed out again, should whoever has it never
-- change it; that comes first then. Of those due at one time the one that was changed first comes first.
--
-- A record is its version, when it is due (seconds, 0 never), and a body that nothing here opens.


-- Microseconds until the next is to be handed out, 0 when it is; -1 when none will be.
local function next_firing()
  local soonest = -1
  for _, key in ipairs({B .. ':claimed', B .. ':firing'}) do
    local first = call('ZRANGE', key, 0, 0, 'WITHSCORES')
    if first[1] and (soonest < 0 or first[2] - now < soonest) then soonest = math.max(0, first[2] - now) end
  end
  return soonest
end

local hand_out

do

local CLAIM = 1000000 -- microseconds, as CLAIM of brokers/contract/schedules.py says

-- Those that are due, at most so many, as (now, name, record, …); nothing when there are none.
function hand_out(most)
  local members, names, out, claimed = {}, {}, {}, {}
  for _, key in ipairs({B .. ':claimed', B .. ':firing'}) do
    local due = #members < most and call('ZRANGEBYSCORE', key, '-inf', now, 'LIMIT', 0, most - #members) or {}
    for _, member in ipairs(due) do members[#members + 1] = member end
    call_all('ZREM', key, due)
  end
  local again = text_of(now + CLAIM)
  for i, member in ipairs(members) do
    names[i] = sub(member, 9)
    claimed[#claimed + 1] = again
    claimed[#claimed + 1] = member
  end
  call_all('ZADD', B .. ':claimed', claimed)
  if #names > 0 then out[1] = text_of(now) end
  for i, record in ipairs(fetch_all(B .. ':schedule', names)) do
    out[2 * i], out[2 * i + 1] = names[i], record
  end
  return out
end

end

-- Owners that were told of no time before this one look again.
local function fire_sooner(time)
  for _, owner in ipairs(call('ZRANGEBYSCORE', B .. ':fires', '(' .. string.format('%.0f', time), '+inf')) do hint_owner(owner) end
end
