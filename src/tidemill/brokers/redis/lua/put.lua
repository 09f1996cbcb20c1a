-- Accept jobs, all or none, in order.
--
-- ARGV  5 how many, then four arguments each (see puts.lua); then, or nothing more:
--       n ids of those that are held, n ids of such as are let go
-- Returns 1 when all were created; else {what, id, what, id, …}; or why not: {'id', id},
--       {'key', id, key}, {'full', queue, max_size}, {'waits', id}: it does not; {'moved', where}; 'due' when
--       ticks are to go on with what came due before it is called again. Then nothing was stored.

local again = said_before() or departure()
if again then return again end

local many, last = tonumber(ARGV[5]), nil
last = 5 + many * 4

local on_hold, let_go, linked = {}, {}, false
if ARGV[last + 1] then
  local holds = tonumber(ARGV[last + 1])
  for i = last + 2, last + 1 + holds do on_hold[ARGV[i]] = true end
  for i = last + 3 + holds, #ARGV do let_go[#let_go + 1] = ARGV[i] end
  linked = true
end

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
        local found = Keys.find(key) or {}
        held[key] = {over = found.over}
        for _, holder in ipairs({found.holder, found.successor}) do
          local j = load_job(holder)
          table.insert(held[key], {j.queue, j.state == RUNNING})
        end
      end
      holders = held[key]
      if (#holders > 0 or holders.over) and conflict == C_REJECT then return {'key', id, key} end
    end
    if ids[id] or jobs[id] then return {'id', id} end
    if not holders or not holders.over and (#holders == 0 or conflict == C_REPLACE) then
      local stays = holders and holders[1] and holders[1][2] and holders[1] or nil
      for n, holder in ipairs(holders or {}) do
        if holder ~= stays then added[holder[1]] = (added[holder[1]] or 0) - 1 end
      end
      local row = find_row(queue)
      if row and row.max_size > 0 and not (flagged(byte(record, 2), LINKED) and byte(ARGV[i + 3], LINKS_WAITS) > 0) then
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

-- The same for links to what is not there, or waits for nothing more.
local function refused_links()
  local named, seen, coming = {}, {}, {}
  local function name(id)
    if not seen[id] then named[#named + 1] = id end
    seen[id] = true
  end
  for _, id in ipairs(let_go) do name(id) end
  for i = 6, last, 4 do
    if flagged(byte(ARGV[i + 1], 2), LINKED) then
      local links = parse_links(ARGV[i + 3])
      flows.links[ARGV[i]] = links
      for _, id in ipairs(links.next) do
        if not coming[id] then name(id) end
      end
      if links.waits > 0 then coming[ARGV[i]] = true end
    end
  end
  read_waits_ahead(named)
  read_ahead(named)
  for _, id in ipairs(named) do
    local j = wait_of(id) and load_job(id)
    if not j or j.state ~= WAITING then return {'waits', id} end
  end
  return nil
end

do
  -- A job whose time has passed must not refuse another.
  local first = call('ZRANGE', K_DUE, 0, 0, 'WITHSCORES')
  if first[1] and tonumber(first[2]) <= now then
    if come_due() then
      finish_step()
      return 'due'
    end
    flush()
  end
  local ids = {}
  for i = 6, last, 4 do ids[#ids + 1] = ARGV[i] end
  read_ahead(ids)
end
local why = refused() or linked and refused_links()
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
if linked then
  for _, id in ipairs(let_go) do count_down(id, false, '') end
  begin_all(6, many, on_hold)
end
finish_step()
return say(plain and 1 or puts)
