-- Limits of queues, and the terms of all limits. Limits by name are in lanes.lua.
--
--   B:gate     hash    queue → when its gate is due to open, gate
--   B:terms    hash    n·NAME or q·QUEUE → terms, those that code declared last, if any; ! if set by hand
-- B:due has g·QUEUE for those that time alone opens. A queue's row counts as `parked` what is ready and does not
-- stand in a ready line.
--   B:walk     hash    NAME → how far changed terms were carried, and the terms behind that: see changes.lua

local Terms, Limits = {}, {}

do

-- -- terms -----------------------------------------------------------------------------------------

local function no_terms() return pack('>Bdddddddd', 0, 0, 0, 1, 0, 0, 0, 0, 0) end

-- What holds, what code declared, and whether the first was set by hand, of a limit by name (n) or a queue's
-- (q); nil when nobody said.
function Terms.known(kind, name)
  local field = kind .. name
  local known = limits.terms[field]
  if known == nil then
    local data = call('HGET', B .. ':terms', field)
    local by_hand = data and #data % Gate.TERMS == 1
    if by_hand then data = sub(data, 1, -2) end
    known = data and {packed = sub(data, 1, Gate.TERMS), declared = sub(data, Gate.TERMS + 1), by_hand = by_hand}
    if known and kind == 'n' then known.walk = Terms.walk_of(name) end
    limits.terms[field] = known
  end
  return known or nil
end

function Terms.of(kind, name) return Gate.terms(Terms.known(kind, name).packed) end

-- Note what code declares, or a person sets ('' has the code's hold): what was set by hand stays whatever code
-- declares. The old terms, the new, and the old ones packed when they are to be changed, or false.
function Terms.set(kind, name, packed, declared)
  local known = Terms.known(kind, name)
  if known and declared and known.declared == packed then return false end
  local is_new = not known
  known = known or {packed = no_terms(), declared = '', by_hand = false}
  local old = known.packed
  if declared then known.declared = packed else known.by_hand = packed ~= '' end
  if packed == '' then packed = known.declared ~= '' and known.declared or no_terms() end
  if not (declared and known.by_hand) then known.packed = packed end
  limits.terms[kind .. name] = known
  call('HSET', B .. ':terms', kind .. name, known.packed .. known.declared .. (known.by_hand and '!' or ''))
  if known.packed == old and not is_new then return false end
  return Gate.terms(old), Gate.terms(known.packed), old
end

-- -- gates of queues -------------------------------------------------------------------------------

-- Read the gate of a queue, before anything changes.
function Gates.load(queue, row)
  local data = call('HGET', B .. ':gate', queue)
  row.base = tonumber(call('HGET', row.key, 'running')) or 0
  local due, at = unpk('>d', data)
  row.gate, row.gate_due = Gate.parse(sub(data, at)), due
  row.terms = Terms.of('q', queue)
  row.closed = due > 0 or Gates.room(row, 1) == 0 -- it let nothing start before this call
end

local function running_in(row) return row.base + (row.by.running or 0) end

-- How many jobs of a queue with a gate may start now.
function Gates.room(row, most) return Gate.room(row.terms, row.gate, running_in(row), most) end

function Gates.is_open(queue)
  local row = find_row(queue)
  return not row or not row.gate or Gates.room(row, 1) > 0
end

function Gates.take(row, many)
  Gate.take(row.terms, row.gate, many)
  row.gate_changed = true
end

-- A lease has ended: with an attempt that went well or not, or going back before it ran: when it was made.
function Gates.ended(row, well, back)
  if well ~= nil then Gate.ended(row.terms, row.gate, well) end
  if back then Gate.give_back(row.terms, row.gate, back, 1) end
  row.gate_changed = true
end

-- A lease made at that time goes to the carrier.
function Gates.hold(row, taken)
  Gate.hold(row.terms, row.gate, taken, 1)
  row.gate_changed = true
end

-- A job lies with the carrier no more.
function Gates.let_go(row, starts)
  Gate.let_go(row.gate, 1)
  if starts then Gate.take(row.terms, row.gate, 1) end
  row.gate_changed = true
end

function Gates.came_due(queue)
  local row = find_row(queue)
  if not row or not row.gate then return end
  row.gate_due, row.gate_changed = 0, true
end

-- Have other terms hold for a queue.
function Gates.set(queue, packed, declared)
  local row = row_of(queue)
  local old, new = Terms.set('q', queue, packed, declared)
  if not old then return end
  row.terms = new
  if not row.gate then
    row.gate, row.gate_due = Gate.new(), 0
    row.base = tonumber(call('HGET', row.key, 'running')) or 0
    row.gate.held = tonumber(call('HGET', row.key, 'carried')) or 0
    call('HSET', row.key, 'gated', 1)
  end
  Gate.change(old, row.terms, row.gate)
  row.closed, row.gate_changed = true, true
end

function Gates.sync(queue, row)
  local when = Gate.opens(row.terms, row.gate, running_in(row), 1)
  if when == 0 and row.closed then
    row.closed = false
    for _, kind in ipairs(KINDS) do
      local line = kind .. queue
      rings[line] = math.max(rings[line] or 0, call('ZCARD', B .. ':r:' .. line))
    end
  end
  if when == Gate.NEVER or when > 0 and ready_of(queue) == 0 then when = 0 end
  if when == row.gate_due then return end
  if when > 0 then add_due(when, 'g' .. queue) else call('ZREM', K_DUE, 'g' .. queue) end
  row.gate_due, row.gate_changed = when, true
end

end
