-- Limits of queues, and the settings of all limits. Limits by name are in partitions.lua.
--
--   B:gate     hash    queue → time at which its limiter opens, or 0; limiter
--   B:terms    hash    n·NAME or q·QUEUE → settings that hold; settings that code declared, if any; ! if set by hand
--   B:walk     hash    NAME → how far a change has come, and the settings of later partitions: see limit_changes.lua
-- B:due has g·QUEUE for limiters that time alone opens. The counter `parked` of a queue's row has the number of ready
-- jobs that do not stand in a ready line.

local Settings, Limits = {}, {}

do

-- -- settings -----------------------------------------------------------------------------------------

local function no_settings() return pack('>Bdddddddd', 0, 0, 0, 1, 0, 0, 0, 0, 0) end

-- The settings in force for a limit by name (n) or a queue's limit (q), the settings that code declared,
-- and whether the settings in force were set by hand; nil when nobody set the limit.
function Settings.known(kind, name)
  local field = kind .. name
  local known = limits.settings[field]
  if known == nil then
    local data = call('HGET', B .. ':terms', field)
    local by_hand = data and #data % Limiter.SETTINGS_SIZE == 1
    if by_hand then data = sub(data, 1, -2) end
    known = data and {packed = sub(data, 1, Limiter.SETTINGS_SIZE), declared = sub(data, Limiter.SETTINGS_SIZE + 1), by_hand = by_hand}
    if known and kind == 'n' then known.walk = Settings.walk_of(name) end
    limits.settings[field] = known
  end
  return known or nil
end

function Settings.of(kind, name) return Limiter.settings(Settings.known(kind, name).packed) end

-- Store settings that code declares or a person sets; '' from a person restores the declared settings. A
-- declaration does not replace settings set by hand. Returns old settings, new settings and the old
-- settings packed, or false when nothing changes.
function Settings.set(kind, name, packed, declared)
  local known = Settings.known(kind, name)
  if known and declared and known.declared == packed then return false end
  local is_new = not known
  known = known or {packed = no_settings(), declared = '', by_hand = false}
  local old = known.packed
  if declared then known.declared = packed else known.by_hand = packed ~= '' end
  if packed == '' then packed = known.declared ~= '' and known.declared or no_settings() end
  if not (declared and known.by_hand) then known.packed = packed end
  limits.settings[kind .. name] = known
  call('HSET', B .. ':terms', kind .. name, known.packed .. known.declared .. (known.by_hand and '!' or ''))
  if known.packed == old and not is_new then return false end
  return Limiter.settings(old), Limiter.settings(known.packed), old
end

-- -- limiters of queues -------------------------------------------------------------------------------

-- Read the limiter of a queue, before anything changes.
function QueueLimits.load(queue, row)
  local data = call('HGET', B .. ':gate', queue)
  row.base = tonumber(call('HGET', row.key, 'running')) or 0
  local due, at = unpk('>d', data)
  row.limiter, row.limiter_due = Limiter.parse(sub(data, at)), due
  row.settings = Settings.of('q', queue)
  row.closed = due > 0 or QueueLimits.room(row, 1) == 0 -- the limiter let nothing start before this call
end

local function running_in(row) return row.base + (row.by.running or 0) end

-- How many jobs of a queue with a limiter may start now.
function QueueLimits.room(row, most) return Limiter.room(row.settings, row.limiter, running_in(row), most) end

function QueueLimits.is_open(queue)
  local row = find_row(queue)
  return not row or not row.limiter or QueueLimits.room(row, 1) > 0
end

function QueueLimits.take(row, many)
  Limiter.take(row.settings, row.limiter, many)
  row.limiter_changed = true
end

-- Count the end of a lease. `well`: whether its attempt succeeded; nil if there was no attempt. `back`: when the lease
-- was given, if it goes back before its job ran; else false.
function QueueLimits.ended(row, well, back)
  if well ~= nil then Limiter.ended(row.settings, row.limiter, well) end
  if back then Limiter.give_back(row.settings, row.limiter, back, 1) end
  row.limiter_changed = true
end

function QueueLimits.came_due(queue)
  local row = find_row(queue)
  if not row or not row.limiter then return end
  row.limiter_due, row.limiter_changed = 0, true
end

-- Set the settings of a queue's limit.
function QueueLimits.set(queue, packed, declared)
  local row = row_of(queue)
  local old, new = Settings.set('q', queue, packed, declared)
  if not old then return end
  row.settings = new
  if not row.limiter then
    row.limiter, row.limiter_due = Limiter.new(), 0
    row.base = tonumber(call('HGET', row.key, 'running')) or 0
    call('HSET', row.key, 'gated', 1)
  end
  Limiter.change(old, row.settings, row.limiter)
  row.closed, row.limiter_changed = true, true
end

function QueueLimits.sync(queue, row)
  local when = Limiter.opens(row.settings, row.limiter, running_in(row), 1)
  if when == 0 and row.closed then
    row.closed = false
    for _, kind in ipairs(KINDS) do
      local line = kind .. queue
      rings[line] = math.max(rings[line] or 0, call('ZCARD', B .. ':r:' .. line))
    end
  end
  if when == Limiter.NEVER or when > 0 and ready_of(queue) == 0 then when = 0 end
  if when == row.limiter_due then return end
  if when > 0 then add_due(when, 'g' .. queue) else call('ZREM', K_DUE, 'g' .. queue) end
  row.limiter_due, row.limiter_changed = when, true
end

end
