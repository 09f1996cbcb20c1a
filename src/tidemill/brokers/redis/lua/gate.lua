-- The arithmetic of limits, as tidemill/gate.py has it: when the next job may start.
--
-- Terms come packed from the client: which there are (1 a rate, 2 a window, 4 concurrency, 8 a breaker),
-- then all eight numbers. A gate is what is remembered: full, failures, wait (until the breaker lets one
-- try), slots {end, count, …}, held (what jobs cost that lie with the carrier).

local Gate = {NEVER = 1 / 0, TERMS = 65}
do

local SLOTS, SLACK = 64, 1

do
  local parsed = {} -- packed terms are few, and never change
  local known = 0

  function Gate.terms(packed)
    if parsed[packed] then return parsed[packed] end
    local which, jobs_, seconds, burst, most, length, concurrency, failures, pause = unpk('>Bdddddddd', packed)
    local terms = {burst = burst, every = 0}
    if flagged(which, 1) then
      terms.rate = jobs_
      if jobs_ > 0 then terms.every = seconds * 1000000 / jobs_ end
    end
    if flagged(which, 2) then terms.window, terms.length = most, math.floor(length * 1000000) end
    if flagged(which, 4) then terms.concurrency = concurrency end
    if flagged(which, 8) then terms.breaker, terms.pause = failures, math.floor(pause * 1000000) end
    if known >= 1000 then parsed, known = {}, 0 end
    parsed[packed], known = terms, known + 1
    return terms
  end
end

function Gate.new() return {full = 0, failures = 0, wait = 0, slots = {}, held = 0} end

local function tokens(terms, gate)
  return terms.every > 0 and terms.burst - math.max(0, gate.full - now) / terms.every or terms.burst
end

local function window_opens(terms, gate, cost)
  if terms.window == 0 then return Gate.NEVER end
  local used, need, when = gate.held, math.min(cost, terms.window), 0
  local slots = gate.slots
  for i = 1, #slots, 2 do
    if slots[i] + terms.length > now then used = used + slots[i + 1] end
  end
  for i = 1, #slots, 2 do
    if slots[i] + terms.length > now then
      if used + need <= terms.window then break end
      used, when = used - slots[i + 1], slots[i] + terms.length
    end
  end
  if gate.held > 0 and used + need > terms.window then return Gate.NEVER end
  return when
end

-- How many jobs may run at a time: after a failure no more than may fail yet, but one.
local function most_running(terms, gate)
  local most = terms.concurrency or Gate.NEVER
  if terms.breaker and gate.failures > 0 then most = math.min(most, math.max(1, terms.breaker - gate.failures)) end
  return most
end

-- When a job of that cost may start: 0 now, NEVER when no time alone opens the gate.
function Gate.opens(terms, gate, running, cost)
  local when = 0
  if terms.concurrency and running >= terms.concurrency then return Gate.NEVER end
  if terms.breaker and gate.failures >= terms.breaker then when = gate.wait end
  if when <= now and running >= most_running(terms, gate) then return Gate.NEVER end
  if terms.rate then
    if terms.every == 0 then return Gate.NEVER end
    local spare = terms.burst - gate.held - math.min(cost, terms.burst)
    if gate.held > 0 and spare < 0 then return Gate.NEVER end
    when = math.max(when, math.floor(gate.full - spare * terms.every - SLACK))
  end
  if terms.window then when = math.max(when, window_opens(terms, gate, cost)) end
  return when > now and when or 0
end

-- How many jobs that cost 1 may start now, `most` at most.
function Gate.room(terms, gate, running, most)
  if Gate.opens(terms, gate, running, 1) > 0 then return 0 end
  most = math.min(most, most_running(terms, gate) - running)
  if terms.every > 0 then
    most = math.min(most, math.max(1, math.floor(tokens(terms, gate) - gate.held + SLACK / terms.every)))
  end
  if terms.window then
    local used = gate.held
    for i = 1, #gate.slots, 2 do
      if gate.slots[i] + terms.length > now then used = used + gate.slots[i + 1] end
    end
    most = math.min(most, math.max(1, math.floor(terms.window - used)))
  end
  return most
end

-- A job of that cost starts, or several that cost so much together.
function Gate.take(terms, gate, cost)
  if terms.every > 0 then gate.full = math.max(gate.full, now) + cost * terms.every end
  if not terms.window or cost == 0 then return end
  local width, slots = math.max(1, math.floor(terms.length / SLOTS)), {}
  for i = 1, #gate.slots, 2 do
    if gate.slots[i] + terms.length > now then
      slots[#slots + 1] = gate.slots[i]
      slots[#slots + 1] = gate.slots[i + 1]
    end
  end
  local slot_end = (math.floor(now / width) + 1) * width
  if #slots > 0 and slots[#slots - 1] >= slot_end then
    slots[#slots] = slots[#slots] + cost
  else
    slots[#slots + 1] = slot_end
    slots[#slots + 1] = cost
  end
  gate.slots = slots
end

-- A job that was taken at that time has not run: its slot of the window counts it no more.
function Gate.give_back(terms, gate, taken, cost)
  gate.full = gate.full - cost * terms.every
  if not terms.window then return end
  local width, slots = math.max(1, math.floor(terms.length / SLOTS)), gate.slots
  for i = 1, #slots, 2 do
    if slots[i] > taken then
      if slots[i] - width <= taken then slots[i + 1] = math.max(0, slots[i + 1] - cost) end
      return
    end
  end
end

-- A job that was taken at that time goes to the carrier: it takes its tokens when it starts, and until then
-- nobody else can.
function Gate.hold(terms, gate, taken, cost)
  Gate.give_back(terms, gate, taken, cost)
  gate.held = gate.held + cost
end

-- It lies there no more.
function Gate.let_go(gate, cost) gate.held = math.max(0, gate.held - cost) end

-- An attempt has succeeded, or failed: what the breaker goes by.
function Gate.ended(terms, gate, well)
  if not terms.breaker then return end
  gate.failures = well and 0 or gate.failures + 1
  if gate.failures >= terms.breaker then gate.wait = now + terms.pause end
end

-- Other terms hold from now on: the tokens stay, as far as the new bucket holds them.
function Gate.change(old, new, gate)
  if gate.full <= now or not new.rate then
    gate.full = 0
  elseif new.every > 0 and old.every > 0 then
    gate.full = now + (new.burst - math.min(new.burst, tokens(old, gate))) * new.every
  elseif new.every > 0 then
    gate.full = math.min(gate.full, now + new.burst * new.every)
  end
  if not new.window then gate.slots = {} end
  if not new.breaker then gate.failures = 0 end
end

-- From when on a gate is as if it had never been used, if it is not used until then.
function Gate.clear_at(terms, gate)
  local last = 0
  if #gate.slots > 0 and terms.window then last = gate.slots[#gate.slots - 1] + terms.length end
  return math.max(gate.full ~= 0 and math.floor(gate.full) + 1 or 0, last)
end

-- Stored as all its numbers in a row: as doubles, for they are times and fractions. With what is held their
-- number is even.
function Gate.pack(gate)
  local data = {pack('>ddd', gate.full, gate.failures, gate.wait)}
  if gate.held > 0 then data[2] = pack('>d', gate.held) end
  for _, number in ipairs(gate.slots) do data[#data + 1] = pack('>d', number) end
  return table.concat(data)
end

function Gate.parse(data)
  local gate = {slots = {}, held = 0}
  local at
  gate.full, gate.failures, gate.wait, at = unpk('>ddd', data)
  if #data % 16 == 0 then gate.held, at = unpk('>d', data, at) end
  while at <= #data do gate.slots[#gate.slots + 1], at = unpk('>d', data, at) end
  return gate
end

end
