-- Schedules: records under their names, and the order in which they are handed out. A schedule that is handed out moves
-- from B:firing to B:claimed. If the owner that got the schedule does not change it, the schedule is handed out again
-- after CLAIM, before all others. Of schedules due at the same time, the schedule that was changed first comes first.
--
-- A record is its version, its due time (seconds, 0 never), and a body that the store does not read.


-- Microseconds until the next schedule is handed out, 0 when one is due now; -1 when there is none.
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

local CLAIM = 1000000 -- microseconds, equal to CLAIM of brokers/contract/schedules.py

-- Hand out the schedules that are due, `most` at most: {name, record, …}.
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
  for i, record in ipairs(fetch_all(B .. ':schedule', names)) do
    out[2 * i - 1], out[2 * i] = names[i], record
  end
  return out
end

end

-- Wake the owners that handle schedules and were told a later due time than `time`.
local function fire_sooner(time)
  for _, owner in ipairs(call('ZRANGEBYSCORE', B .. ':fires', '(' .. string.format('%.0f', time), '+inf')) do hint_owner(owner) end
end
