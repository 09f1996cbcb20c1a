-- Hints. The call that finds no job for a sleeper also lists the sleeper in B:asleep, so no put can fall in
-- between. A hint removes the sleeper from B:asleep, so no sleeper is hinted twice. If nobody receives a hint, its
-- sleeper is gone, and the next sleeper gets the hint.

-- Hint a sleeper; true when somebody received the hint. The text of a hint is empty, or a lease: see handoff.lua.
local function hint(sleeper, text) return call('PUBLISH', B .. ':w:' .. sleeper, text or '') > 0 end

local function hint_owner(owner) -- even if it is not asleep: it may be about to sleep
  call('ZREM', K_ASLEEP, owner)
  hint(owner)
end

-- True if a sleeper sleeps since this time; it is now off B:asleep. An entry of another time is of an earlier sleep,
-- and the sleeper may wait for other queues by now.
local function wake(sleeper, since)
  local slept = call('HGET', B .. ':o:' .. sleeper, 'slept')
  return slept and tonumber(slept) == tonumber(since) and call('ZREM', K_ASLEEP, sleeper) == 1
end

-- Hint up to `most` sleepers of a line. Sleepers that named its queue come before sleepers that take from all queues.
-- `text_for`, if given, returns the text for a sleeper. True when so many were hinted.
local function ring(line, most, text_for)
  for _, key in ipairs({B .. ':z:' .. line, B .. ':z:' .. sub(line, 1, 1)}) do
    while most > 0 do
      local first = call('ZPOPMIN', key)
      if not first[1] then break end
      local sleeper = first[1]
      if wake(sleeper, first[2]) and hint(sleeper, text_for and text_for(sleeper)) then most = most - 1 end
    end
  end
  return most == 0
end

-- Pass a hint on, since jobs may be left in the lines given, or in any line.
local function ring_rest(lines)
  if call('EXISTS', K_ASLEEP) == 0 then return end
  for _, line in ipairs(lines or call('ZRANGE', K_LINES, 0, 99)) do
    if not rings[line] and call('EXISTS', B .. ':r:' .. line) == 1 then rings[line] = 1 end
  end
end

local function hint_everybody()
  for _, sleeper in ipairs(call('ZRANGE', K_ASLEEP, 0, -1)) do hint_owner(sleeper) end
end

local finish_step

do

-- Hint a sleeper when an entry of B:due comes due before any sleeper looks again.
local function keep_time()
  local first = call('ZRANGE', K_DUE, 0, 0, 'WITHSCORES')
  if not first[1] then return end
  while true do
    local sleeper = call('ZRANGE', K_ASLEEP, 0, 0, 'WITHSCORES')
    if not sleeper[1] or tonumber(sleeper[2]) <= tonumber(first[2]) then return end
    call('ZREM', K_ASLEEP, sleeper[1])
    if hint(sleeper[1]) then return end
  end
end

-- Hint all sleepers that wait for the end of a job, or for room in a queue, and take them off these lists.
local function tell_waiting()
  if #finished > 0 and call('EXISTS', K_WAITS) == 1 then
    local heard = {}
    for i, channels in ipairs(fetch_all(K_WAITS, finished)) do
      if channels then
        for sleeper in string.gmatch(channels, '%S+') do
          if not heard[sleeper] then hint(sleeper) end
          heard[sleeper] = true
        end
        call('HDEL', K_WAITS, finished[i])
      end
    end
  end
  for queue in pairs(shrunk) do
    local key = B .. ':space:' .. queue
    for _, sleeper in ipairs(call('SMEMBERS', key)) do hint(sleeper) end
    call('DEL', key)
  end
end

-- End a call that may have moved a job: write all changes, and wake sleepers.
function finish_step()
  flow()
  Limits.sync()
  flush()
  Limits.flush()
  flush_rows()
  if next(rings) and call('EXISTS', K_ASLEEP) == 1 then
    for line, most in pairs(rings) do
      local row = row_of(sub(line, 2))
      if row.limiter then most = QueueLimits.room(row, most) end
      if not row.paused then ring(line, math.min(most, call('ZCARD', B .. ':r:' .. line))) end
    end
  end
  tell_waiting()
  if due_moved then keep_time() end
end

end
