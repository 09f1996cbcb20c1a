-- The last part of an exchange: what the owner is given, and told.

flow()
Limits.sync()
flush() -- what was settled may be leased again, and what waited for it
local taken = ''
if #takes > 0 then
  taken = Carrier.take(takes, owner, consumer, moved)
  flow()
  Limits.sync()
  flush()
end
local kinds, groups = {}, {}
if ARGV[8] ~= '' and not moved then
  if flagged(kind_bits, 1) then kinds[#kinds + 1] = 'T' end
  if flagged(kind_bits, 2) then kinds[#kinds + 1] = 'M' end
  local back = #knows > 0 and wanted > 0 and Unknown.bring_back(knows, queues, wanted) or {}
  if #back > 0 then
    Limits.sync()
    flush()
    if not flagged(kind_bits, 1) then lend_aside(back) end
  end
  if wanted > 0 and flagged(kind_bits, 4) then take_lost() end
  local only = mode == 0 and #queues == 0 and #kinds == 1 and kinds[1]
  if not only then groups = wanted_lines(kinds) end
  if flagged(kind_bits, 4) then kinds[#kinds + 1] = 'L' end
  if wanted > #leases / 2 then
    if only then
      take_from_next(only, wanted)
    elseif mode == 0 then
      table.sort(groups, function(a, b) return sub(a[1], 2) < sub(b[1], 2) end)
      take_fairly(after_last(groups), wanted)
    elseif mode == 2 then
      if #groups > 0 then take_lines(flat(groups), wanted - #leases / 2) end
    else
      for _, group in ipairs(groups) do
        if #leases / 2 < wanted then take_lines(group, wanted - #leases / 2) end
      end
    end
  end
  -- The hand is full: whatever it was woken for may be left for another.
  if #leases / 2 >= wanted then
    local rest = flat(groups)
    for _, queue in ipairs(queues) do rest[#rest + 1] = 'L' .. queue end
    if #kinds > 0 then ring_rest(#queues > 0 and rest or nil) end
  end
  Unknown.undo(back, flagged(kind_bits, 1))
end
if #verdicts > 0 then
  local most = 2 * #verdicts + 2
  prune(most, next(flows.links) and most, next(limits.lanes) and most)
end

-- -- the answer ------------------------------------------------------------------------------------

if behalf then
  Limits.sync()
  finish_step()
  return {table.concat(settled), table.concat(touched)}
end
local commands = call('LPOP', B .. ':c:' .. owner, 100) or {}
if moved and wanted > 0 then table.insert(commands, 1, pack('>I8', 0) .. 'quiet') end
settled, touched = table.concat(settled), table.concat(touched)
call('HSET', K_OWNER, 'serial', serial, 'last', last_queue, 'answer',
  cmsgpack.pack({settled, touched, first_token, last_token, commands, taken}))
Limits.sync()
local due, schedules, unknown = more and 0 or next_due(), {}, {}
if left_place and (due < 0 or due > 50000) then due = 50000 end -- GRACE of brokers/limiting.py
local fires = tonumber(ARGV[9])
if fires > 0 and not moved then
  schedules = hand_out(fires)
  local firing = next_firing()
  call('ZADD', B .. ':fires', firing < 0 and '+inf' or now + firing, owner)
  if firing >= 0 and (due < 0 or firing < due) then due = firing end
end
if asked >= 0 then
  local follow_more
  unknown, follow_more = Unknown.tell(text_of(asked))
  if follow_more then due = 0 end
end
if ARGV[8] ~= '' then
  if sleeps == 1 and #leases / 2 < wanted then -- it has room for what comes next
    call('ZADD', K_ASLEEP, due < 0 and '+inf' or now + due, owner)
    if asked >= 0 and (#knows > 0 or not flagged(kind_bits, 1)) then call('ZADD', B .. ':z:U', now, owner) end
    for _, kind in ipairs(kinds) do
      if #queues == 0 then call('ZADD', B .. ':z:' .. kind, now, owner) end
      for _, queue in ipairs(queues) do call('ZADD', B .. ':z:' .. kind .. queue, now, owner) end
    end
  elseif call('ZREM', K_ASLEEP, owner) == 1 then
    due_moved = true -- it kept the time for others, perhaps
  end
end
finish_step()
return {settled, touched, leases, commands, due, next_death(), inputs, schedules, me[7] or '', taken, unknown, behind and 1 or 0, strays}
