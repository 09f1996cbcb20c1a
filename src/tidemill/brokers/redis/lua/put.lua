-- Accept jobs, all or none, in order.
--
-- ARGV  5 how many, then four arguments each (see puts.lua)
-- Returns 1 when all were created; else {what, id, what, id, …}; or why not: {'id', id},
--       {'key', id, key}, {'full', queue, max_size}, {'moved', where}, and nothing was stored.

local again = said_before() or departure()
if again then return again end

local many, last = tonumber(ARGV[5]), nil
last = 5 + many * 4

-- Play the puts through for what could refuse one, before any is stored.
local function refused()
  local ids, held, added = {}, {}, {}
  for i = 6, last, 4 do
    local id, record = ARGV[i], ARGV[i + 1]
    local queue, key = unpk('>Bc0Bc0', record, RECORD_RANK + 4)
    local holders, conflict = nil, C_KEEP
    if key ~= '' then
      conflict = byte(ARGV[i + 3], 1)
      if not held[key] then
        held[key] = {}
        for _, holder in ipairs({holders_of(key)}) do
          local j = load_job(holder)
          table.insert(held[key], {j.queue, j.state == RUNNING})
        end
      end
      holders = held[key]
      if #holders > 0 and conflict == C_REJECT then return {'key', id, key} end
    end
    if ids[id] or jobs[id] then return {'id', id} end
    if not holders or #holders == 0 or conflict == C_REPLACE then
      local stays = holders and holders[1] and holders[1][2] and holders[1] or nil
      for n, holder in ipairs(holders or {}) do
        if holder ~= stays then added[holder[1]] = (added[holder[1]] or 0) - 1 end
      end
      local row = find_row(queue)
      if row and row.max_size > 0 then
        row.size = row.size or size_of(queue)
        if row.size + (added[queue] or 0) >= row.max_size then return {'full', queue, tostring(row.max_size)} end
      end
      added[queue] = (added[queue] or 0) + 1
      ids[id] = true
      if key ~= '' then held[key] = stays and {stays, {queue, false}} or {{queue, false}} end
    end
  end
  return nil
end

do
  -- A job whose time has passed must not refuse another.
  local first = call('ZRANGE', K_DUE, 0, 0, 'WITHSCORES')
  if first[1] and tonumber(first[2]) <= now then
    while come_due() do flush() end
    flush()
  end
  local ids = {}
  for i = 6, last, 4 do ids[#ids + 1] = ARGV[i] end
  read_ahead(ids)
end
local why = refused()
if why then
  finish_step() -- of what came due
  return why
end
seq = call('INCRBY', B .. ':seq', many) - many
local puts, plain = {}, true
for i = 6, last, 4 do
  local placed, id = put_one(ARGV[i], ARGV[i + 1], ARGV[i + 2], ARGV[i + 3])
  puts[#puts + 1] = placed
  puts[#puts + 1] = id
  plain = plain and placed == CREATED
end
finish_step()
return say(plain and 1 or puts)
