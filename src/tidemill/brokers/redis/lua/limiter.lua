-- The arithmetic of limits, the same as in tidemill/limits/arithmetic.py: when the next job may start.
--
-- Settings come packed from the client: the bits of the settings that exist (1 a rate, 2 a window, 4 concurrency,
-- 8 a breaker), then all eight numbers. A limiter is the state of one limit: full (when the bucket is full), failures,
-- wait (until the breaker lets a job try), slots {end, count, …}.

local Limiter = {NEVER = 1 / 0, SETTINGS_SIZE = 65}
do

local SLOTS, SLACK = 64, 1

do
  local parsed = {} -- packed settings are few, and never change
  local known = 0

  function Limiter.settings(packed)
    if parsed[packed] then return parsed[packed] end
    local which, jobs_, seconds, burst, most, length, concurrency, failures, pause = unpk('>Bdddddddd', packed)
    local settings = {burst = burst, every = 0}
    if flagged(which, 1) then
      settings.rate = jobs_
      if jobs_ > 0 then settings.every = seconds * 1000000 / jobs_ end
    end
    if flagged(which, 2) then settings.window, settings.length = most, math.floor(length * 1000000) end
    if flagged(which, 4) then settings.concurrency = concurrency end
    if flagged(which, 8) then settings.breaker, settings.pause = failures, math.floor(pause * 1000000) end
    if known >= 1000 then parsed, known = {}, 0 end
    parsed[packed], known = settings, known + 1
    return settings
  end
end

function Limiter.new() return {full = 0, failures = 0, wait = 0, slots = {}} end

local function tokens(settings, limiter)
  return settings.every > 0 and settings.burst - math.max(0, limiter.full - now) / settings.every or settings.burst
end

local function window_opens(settings, limiter, cost)
  if settings.window == 0 then return Limiter.NEVER end
  local used, need, when = 0, math.min(cost, settings.window), 0
  local slots = limiter.slots
  for i = 1, #slots, 2 do
    if slots[i] + settings.length > now then used = used + slots[i + 1] end
  end
  for i = 1, #slots, 2 do
    if slots[i] + settings.length > now then
      if used + need <= settings.window then break end
      used, when = used - slots[i + 1], slots[i] + settings.length
    end
  end
  return when
end

-- How many jobs may run at a time. After failures: as many as may fail before the breaker opens, but at
-- least one.
local function most_running(settings, limiter)
  local most = settings.concurrency or Limiter.NEVER
  if settings.breaker and limiter.failures > 0 then most = math.min(most, math.max(1, settings.breaker - limiter.failures)) end
  return most
end

-- The time at which a job of this cost may start: 0 for now, NEVER when time alone does not open the
-- limiter.
function Limiter.opens(settings, limiter, running, cost)
  local when = 0
  if settings.concurrency and running >= settings.concurrency then return Limiter.NEVER end
  if settings.breaker and limiter.failures >= settings.breaker then when = limiter.wait end
  if when <= now and running >= most_running(settings, limiter) then return Limiter.NEVER end
  if settings.rate then
    if settings.every == 0 then return Limiter.NEVER end
    local spare = settings.burst - math.min(cost, settings.burst)
    when = math.max(when, math.floor(limiter.full - spare * settings.every - SLACK))
  end
  if settings.window then when = math.max(when, window_opens(settings, limiter, cost)) end
  return when > now and when or 0
end

-- How many jobs that cost 1 may start now, `most` at most.
function Limiter.room(settings, limiter, running, most)
  if Limiter.opens(settings, limiter, running, 1) > 0 then return 0 end
  most = math.min(most, most_running(settings, limiter) - running)
  if settings.every > 0 then
    most = math.min(most, math.max(1, math.floor(tokens(settings, limiter) + SLACK / settings.every)))
  end
  if settings.window then
    local used = 0
    for i = 1, #limiter.slots, 2 do
      if limiter.slots[i] + settings.length > now then used = used + limiter.slots[i + 1] end
    end
    most = math.min(most, math.max(1, math.floor(settings.window - used)))
  end
  return most
end

-- Take the tokens of a job that starts, or of several jobs with this cost together.
function Limiter.take(settings, limiter, cost)
  if settings.every > 0 then limiter.full = math.max(limiter.full, now) + cost * settings.every end
  if not settings.window or cost == 0 then return end
  local width, slots = math.max(1, math.floor(settings.length / SLOTS)), {}
  for i = 1, #limiter.slots, 2 do
    if limiter.slots[i] + settings.length > now then
      slots[#slots + 1] = limiter.slots[i]
      slots[#slots + 1] = limiter.slots[i + 1]
    end
  end
  local slot_end = (math.floor(now / width) + 1) * width
  if #slots > 0 and slots[#slots - 1] >= slot_end then
    slots[#slots] = slots[#slots] + cost
  else
    slots[#slots + 1] = slot_end
    slots[#slots + 1] = cost
  end
  limiter.slots = slots
end

-- Give back the tokens of a job that was taken at the time `taken` and has not run. The slot of the
-- window no longer counts the job.
function Limiter.give_back(settings, limiter, taken, cost)
  limiter.full = limiter.full - cost * settings.every
  if not settings.window then return end
  local width, slots = math.max(1, math.floor(settings.length / SLOTS)), limiter.slots
  for i = 1, #slots, 2 do
    if slots[i] > taken then
      if slots[i] - width <= taken then slots[i + 1] = math.max(0, slots[i + 1] - cost) end
      return
    end
  end
end

-- Count the success or failure of an attempt for the breaker.
function Limiter.ended(settings, limiter, well)
  if not settings.breaker then return end
  limiter.failures = well and 0 or limiter.failures + 1
  if limiter.failures >= settings.breaker then limiter.wait = now + settings.pause end
end

-- Change to other settings: the tokens stay, as far as the new bucket can hold them.
function Limiter.change(old, new, limiter)
  if limiter.full <= now or not new.rate then
    limiter.full = 0
  elseif new.every > 0 and old.every > 0 then
    limiter.full = now + (new.burst - math.min(new.burst, tokens(old, limiter))) * new.every
  elseif new.every > 0 then
    limiter.full = math.min(limiter.full, now + new.burst * new.every)
  end
  if not new.window then limiter.slots = {} end
  if not new.breaker then limiter.failures = 0 end
end

-- The time from which an unused limiter equals a new one.
function Limiter.clear_at(settings, limiter)
  local last = 0
  if #limiter.slots > 0 and settings.window then last = limiter.slots[#limiter.slots - 1] + settings.length end
  return math.max(limiter.full ~= 0 and math.floor(limiter.full) + 1 or 0, last)
end

-- Pack the numbers of a limiter as doubles, since they are times and fractions.
function Limiter.pack(limiter)
  local data = {pack('>ddd', limiter.full, limiter.failures, limiter.wait)}
  for _, number in ipairs(limiter.slots) do data[#data + 1] = pack('>d', number) end
  return table.concat(data)
end

function Limiter.parse(data)
  local limiter = {slots = {}}
  local at
  limiter.full, limiter.failures, limiter.wait, at = unpk('>ddd', data)
  while at <= #data do limiter.slots[#limiter.slots + 1], at = unpk('>d', data, at) end
  return limiter
end

end
